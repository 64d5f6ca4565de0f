"""Keeps long prompts from blocking other requests: limits prefill passes by time and runs short prompts first.

`times` predicts the time of a pass, `order` chooses the next prompt, `pacer` applies both to SGLang's scheduler.
"""
