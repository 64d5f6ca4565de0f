"""Drivers of the race, one file per implementation; race.py runs each in its own environment.

A driver imports only the standard library, `driver.py` and its implementation. The driver of SGLang also imports the
plug-in.
"""
