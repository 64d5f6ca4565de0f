"""Containment: no request ends the server, and none waits for ever.

A request that SGLang cannot serve ends alone, with one sentence. Requests beside it go on, and their tokens are the
same as without it. Each ring catches what the ring before it lets through. docs/dev/faults.md has what they do not
cover.

door (`door.py`, `bounds.py`): the tokenizer process refuses wrong types and values with status 400.
arrivals (`arrivals.py`): the scheduler takes in one message at a time, and answers one that it cannot take in.
budgets (`budgets.py`): what one request may cost all others in regexes, grammars and compilers.
logits (`logits.py`): the sampler gets finite rows.
passes (`passes.py`): a failure of Fluxion's own code in a forward pass ends the requests of the pass.
loop (`loop.py`, `suspects.py`, `frames.py`): an exception that leaves SGLang's event loop ends the guilty request; the
    others go back into the queue, and the loop is entered again.
admission (`admission.py`): a request that can never be admitted ends.
outputs (`outputs.py`): where a batch of outputs fails, its rows are sent and detokenized one by one.

`ledger.py` knows which requests have no answer yet. `ending.py` ends one. `counts.py` counts.
"""
