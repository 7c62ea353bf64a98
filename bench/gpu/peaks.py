"""What could the GPU do at best? Its peak by name, for the share of it that a model uses (MFU)."""

from __future__ import annotations

# Dense bfloat16 with tensor cores, in FLOP/s, from NVIDIA's data sheets; the first that fits.
_PEAKS = (
    ("B200", 2250e12),
    ("GH200", 989.4e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756.5e12),
    ("H100", 989.4e12),
    ("A100", 311.9e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)


def peak_flops(name: str) -> float | None:
    """Look a GPU's peak up by the name that torch gives it; None where it is not known."""
    words = name.replace("-", " ").split()
    for known, peak in _PEAKS:
        parts = known.split()
        starts = range(len(words) - len(parts) + 1)
        if any(words[start : start + len(parts)] == parts for start in starts):
            return peak
    return None
