"""The table of families behind docs/models.md contains every model of the zoo, and SGLang has every class."""

from __future__ import annotations

import zoo

from fluxion_sglang.sglang.start.language_model import CLASSES
from fluxion_sglang.sglang.start.served_models import SERVED


def test_every_family_that_is_tested_is_on_the_page() -> None:
    tested = [name for family in SERVED for name in family.tests]
    assert len(set(tested)) == len(tested)
    assert set(tested) == set(zoo.FAMILIES | zoo.BY_TRANSFORMERS | zoo.VISION_LANGUAGE)


def test_sglang_has_every_class() -> None:
    from sglang.srt.models.registry import ModelRegistry

    classes = {name for family in SERVED for name in family.classes} | set(CLASSES.values())
    assert classes <= set(ModelRegistry.get_supported_archs())
    for family, config in zoo.BY_TRANSFORMERS.items():
        (of,) = [each for each in SERVED if family in each.tests]
        assert set(of.classes) >= set(config().architectures or of.classes)
