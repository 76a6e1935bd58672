"""The canonical order of a header's entries (SPEC section 11)."""

from __future__ import annotations

from collections.abc import Iterable

from rsv_format.header import Header, replace


def arrange(header: Header) -> Header:
    """The canonical order: layers, tensors and attachments by name, tables by first use (SPEC section 11)."""
    layers = sorted(header.layers, key=lambda layer: layer.name)
    codebooks = _first_uses(layer.codebook for layer in layers)
    transforms = _first_uses(layer.transform for layer in layers if layer.transform is not None)
    return replace(
        header,
        codebooks=tuple(header.codebooks[i] for i in codebooks),
        transforms=tuple(header.transforms[i] for i in transforms),
        layers=tuple(
            replace(
                layer,
                codebook=codebooks[layer.codebook],
                transform=None if layer.transform is None else transforms[layer.transform],
            )
            for layer in layers
        ),
        tensors=tuple(sorted(header.tensors, key=lambda tensor: tensor.name)),
        attachments=tuple(sorted(header.attachments, key=lambda attachment: attachment.name)),
        requires=tuple(sorted(header.requires)),
    )


def _first_uses(positions: Iterable[int]) -> dict[int, int]:
    """Old positions in a table -> new ones, in the order in which they are first used."""
    return {old: new for new, old in enumerate(dict.fromkeys(positions))}
