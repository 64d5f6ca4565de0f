"""Devices beside the CPU: the device library, the mailbox between device and CPU, and the code that uses them."""
