"""Model files, folders and templates made by hand to cost much time or memory, and what each costs.

Random mutation does not find these: each is a sound model but for one thing. The tests bring every family to every
door that takes such input (``tests/model/test_bombs.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from bombs import folders, gguf_files, templates, vocabularies
from bombs.family import Family

FAMILIES: Mapping[str, Family] = {
    family.name: family for module in (gguf_files, vocabularies, folders, templates) for family in module.families()
}
