"""Containment: no request ends the server, and none waits forever.

A request that SGLang cannot serve ends alone, with one sentence. Other requests of its batch continue with the same
tokens. The rings below catch failures in order; each catches what the previous one misses. docs/dev/faults.md lists
what they do not cover.

door (`door.py`, `bounds.py`): the tokenizer process refuses wrong types and values with status 400.
arrivals (`arrivals.py`): the scheduler processes one message at a time, and answers one that it cannot process.
budgets (`budgets.py`): bounds the time of regexes, grammars and compilers of one request.
logits (`logits.py`): the sampler gets finite rows.
passes (`passes.py`): a failure of Fluxion's own code in a forward pass ends the requests of the pass.
loop (`loop.py`, `suspects.py`, `frames.py`): an exception that leaves SGLang's event loop ends the guilty request; the
  others go back into the queue, and the loop is entered again.
admission (`admission.py`): a request that can never be admitted ends.
outputs (`outputs.py`): if a batch of outputs fails, its rows are sent and detokenized one by one.

`ledger.py` tracks requests without an answer, `ending.py` ends a request, `counts.py` counts failures.
"""
