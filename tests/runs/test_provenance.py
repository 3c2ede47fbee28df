"""What a processor says of itself."""

from __future__ import annotations

import pytest

from budgetformer.runs import provenance


@pytest.mark.parametrize(
    ("flags", "saturates", "bf16"),
    [
        ("fpu avx2 fma", True, False),
        ("fpu avx2 avx512f avx512_vnni", False, False),
        ("fpu avx2 avx512_vnni avx512_bf16", False, True),
        ("fpu avx2 avx_vnni amx_bf16", False, True),
        ("", False, False),  # no x86, or no Linux
    ],
)
def test_what_its_flags_mean(flags: str, saturates: bool, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_cpuinfo", lambda key: flags)
    assert (provenance.saturates(), provenance.multiplies_bf16()) == (saturates, bf16)
