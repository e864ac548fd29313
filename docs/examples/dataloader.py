"""Load a rendered dataset through a DataLoader: `python docs/examples/dataloader.py DATASET`."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader

import ident3d


def main(root: str) -> None:
    """Print the dataset, and what one epoch over it gives."""
    data = ident3d.Ident3D(root)
    print(data)
    count, total = 0, torch.zeros(3, dtype=torch.float64)
    for pictures, latents in DataLoader(data, batch_size=64, shuffle=True, num_workers=2):
        count += len(pictures)
        total += pictures.double().mean(dim=(2, 3)).sum(dim=0) / 255
        if count == len(pictures):
            print(f"first batch: pictures {tuple(pictures.shape)} {pictures.dtype},", end=" ")
            print(f"latents {tuple(latents.shape)} {latents.dtype}")
    mean = ", ".join(f"{x:.4f}" for x in total / count)
    stated = ", ".join(f"{x:.4f}" for x in data.mean)
    print(f"one epoch: {count} pictures; mean colour {mean} (the manifest says {stated})")


if __name__ == "__main__":
    main(sys.argv[1])
