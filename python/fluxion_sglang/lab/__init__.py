"""What Fluxion is measured against and by: rival policies, yardsticks, other schedulers, the audit.

Nothing here serves by default, and nothing of the core imports it: it comes in through entry points (`plugins.py`).
"""
