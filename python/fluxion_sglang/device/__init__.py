"""What runs beside the CPU: the device library, the mailbox between the two, and what serves with them."""
