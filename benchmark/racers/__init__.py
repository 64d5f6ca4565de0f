"""The race's drivers, one file an implementation, each run in the environment of its own by race.py.

A driver imports the standard library, `driver.py` and its implementation, nothing else of this repository; that of
SGLang also imports the plug-in.
"""
