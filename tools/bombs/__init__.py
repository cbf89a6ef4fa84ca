"""Model files, folders and templates that are crafted to cost much time or memory, and measurement of their cost.

Random mutation would not find them: each is a valid model except for one thing. The tests pass every family to every
entry point that accepts such input (``tests/model/test_bombs.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from bombs import experts, folders, gguf_files, hybrids, templates, vocabularies
from bombs.family import Family

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for module in (gguf_files, vocabularies, folders, templates, hybrids, experts)
    for family in module.families()
}
