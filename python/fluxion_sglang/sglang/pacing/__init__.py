"""A long prompt stops nobody: prefill passes take a target time, short prompts go first, and decode steps ride along.

`times` predicts what a pass takes, `order` says which prompt is next, `pacer` sets SGLang's scheduler accordingly.
"""
