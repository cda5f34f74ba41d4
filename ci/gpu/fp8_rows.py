"""Cache rows of the fp8_ds_mla layout: made, and read back byte by byte as the layout says.

A row has 656 bytes: 512 e4m3 codes, four float32 scales (one for each 128 codes), 64 bfloat16 RoPE values.
Reading here shares nothing with the kernels under test, nor with torch's own e4m3 type.
"""

from __future__ import annotations

import torch

RANK, GROUP, ROPE = 512, 128, 64
SCALES_END = RANK + RANK // GROUP * 4
ROW_BYTES = SCALES_END + 2 * ROPE
MOST = 448.0  # the largest e4m3 value
NAN_BYTE = 0xFF  # a NaN as e4m3 code, float32 and bfloat16 alike


def value_table(device: torch.device | str) -> torch.Tensor:
    """Return the 256 values of e4m3 in float64: sign, 4 exponent bits biased by 7, 3 mantissa bits."""
    code = torch.arange(256, device=device)
    exponent, mantissa = (code >> 3) & 15, (code & 7).double()
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7).double()
    value = torch.where(exponent > 0, normal, mantissa * 2.0**-9)
    value = torch.where(code & 0x7F == 0x7F, torch.nan, value)
    return torch.where(code >= 0x80, -value, value)


def read_rows(rows: torch.Tensor, rope: int) -> torch.Tensor:
    """Return what rows hold: uint8 [..., 656] to float64 [..., 512 + rope]."""
    latent = value_table(rows.device)[rows[..., :RANK].long()]
    scales = rows[..., RANK:SCALES_END].contiguous().view(torch.float32).double()
    latent = latent * scales.repeat_interleave(GROUP, dim=-1)
    if rope == 0:
        return latent
    tail = rows[..., SCALES_END:].contiguous().view(torch.bfloat16)
    return torch.cat([latent, tail.double()], -1)


def write_row(row: torch.Tensor, values: torch.Tensor) -> None:
    """Store values [512] or [576] in one row as the cache operators do, with scales of powers of two."""
    groups = values[:RANK].float().view(-1, GROUP)
    scales = (groups.abs().amax(-1) / MOST).clamp(min=1e-4).log2().ceil().exp2()
    codes = (groups / scales[:, None]).to(torch.float8_e4m3fn)
    row[:RANK] = codes.flatten().view(torch.uint8)
    row[RANK:SCALES_END] = scales.view(torch.uint8)
    if values.shape[0] > RANK:
        row[SCALES_END:] = values[RANK:].to(torch.bfloat16).contiguous().view(torch.uint8)


def fill_random(rows: torch.Tensor, rope: int, generator: torch.Generator) -> None:
    """Fill uint8 [n, 656] with finite codes of every kind, scales that are no powers of two, RoPE values.

    Values are of the order of one. Some groups are a thousand times smaller and some zero. Without RoPE the
    tail is NaN: nobody reads it.
    """
    count, device = rows.shape[0], rows.device

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator, device=device)

    signed = torch.randint(0, 2 * 0x7F, (count, RANK), generator=generator, device=device)
    rows[:, :RANK] = (signed % 0x7F + 0x80 * (signed // 0x7F)).to(torch.uint8)
    scales = 0.012 * uniform(count, RANK // GROUP) + 1e-3
    kind = uniform(count, RANK // GROUP)
    scales *= torch.where(kind < 0.1, 1e-3, 1.0) * (kind > 0.02)
    rows[:, RANK:SCALES_END] = scales.view(torch.uint8)
    rows[:, SCALES_END:] = NAN_BYTE
    if rope:
        tail = torch.randn(count, ROPE, generator=generator, device=device).bfloat16()
        rows[:, SCALES_END:] = tail.view(torch.uint8)
