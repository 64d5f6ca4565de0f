"""Tests that need a GPU; without one they are skipped (`needs.skip`), and nothing of CUDA is touched."""

from __future__ import annotations

import pytest
import torch
from needs import skip

from fluxion_sglang.device.library import DeviceError, DeviceLibrary, load


@pytest.fixture(scope="session")
def cuda() -> DeviceLibrary:
    if not torch.cuda.is_available():
        skip("no CUDA device")
    try:
        library = load("cuda")
        library.info()
    except DeviceError as error:
        skip(str(error))
    return library
