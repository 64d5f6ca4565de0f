"""Origin of results, recorded in every result file of the benchmarks."""

from __future__ import annotations

import functools
from typing import Final

from fluxion_sglang.commands import provenance
from fluxion_sglang.commands.provenance import ROOT, load, machine, rounded, save

__all__ = ["ROOT", "SAME", "commit", "header", "load", "machine", "rounded", "save", "versions"]

SAME: Final = ("commit", "sources", "machine", "versions", "environment")
"""Runs that agree in these may share a result file."""

_PACKAGES = (*provenance.PACKAGES, "rouge", "rouge-score", "jieba", "wonderwords")  # these make samples and scores
_CODE = (*provenance.CODE, "fluxion_quality")
_MEASURED = (*provenance.MEASURED, "benchmark/*.py", "benchmark/quality/*.py")

versions = functools.partial(provenance.versions, _PACKAGES)
commit = functools.partial(provenance.commit, _MEASURED)
header = functools.partial(provenance.header, packages=_PACKAGES, code=_CODE, paths=_MEASURED)
