"""Keeps long prompts from blocking other requests: sizes prefill passes by time and runs short prompts first.

`times` predicts what a pass takes, `order` says which prompt is next, `pacer` sets SGLang's scheduler accordingly.
"""
