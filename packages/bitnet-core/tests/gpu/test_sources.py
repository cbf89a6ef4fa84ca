"""The kernel sources that a backend passes to its compiler."""

from pathlib import Path

import pytest

from bitnet.core.gpu import KernelSources


def test_files_that_sources_name_stand_in_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "acme_kernels_of_a_test" / "kernels"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    texts = {"all.h": "common\n", "inner.h": "inner\n", "part.h": 'part\n#include "inner.h"\nend of part\n'}
    texts |= {"one.k": 'kernel one\n#include "part.h"\nrest "#include"\n', "two.k": "kernel two\n"}
    texts |= {"vendor/three.k": 'kernel three\n#include "vendor/part.h"\n', "vendor/part.h": '#include "inner.h"\n'}
    (folder / "vendor").mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = KernelSources("acme_kernels_of_a_test", "acme", ending=".k", common="all.h", entry=r"^kernel (\w+)")
    assert sources.text("one") == 'common\nkernel one\npart\ninner\nend of part\nrest "#include"\n'
    assert sources.text("two") == "common\nkernel two\n"
    assert sources.text("vendor/three") == "common\nkernel three\ninner\n"
    assert sources.names() == {"one_acme", "two_acme", "three_acme"}
    for vendors, more in (((), set()), (("other",), set()), (("vendor",), {"three_acme"})):
        sources = KernelSources(
            "acme_kernels_of_a_test", "acme", ending=".k", common="all.h", entry=r"^kernel (\w+)", vendors=vendors
        )
        assert sources.names() == {"one_acme", "two_acme"} | more
