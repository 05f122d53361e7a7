"""Train a U-Net to segment discs in noise.

``plain_unet.py`` is an ordinary script for one device; ``piped_unet.py`` is the same script over
two devices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fxpipe


def block(inputs: int, outputs: int) -> nn.Sequential:
    first = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
    second = [nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
    return nn.Sequential(*first, *second)


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.pool, self.widen = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.down1(image)
        coarse = self.down2(self.pool(fine))
        x = self.widen(self.bottom(self.pool(coarse)))
        x = self.widen(self.up2(torch.cat([x, coarse], 1)))
        logits: Tensor = self.head(self.up1(torch.cat([x, fine], 1)))
        return logits


def discs(count: int, size: int = 16) -> TensorDataset:
    at = torch.arange(size)
    x, y, radius = (torch.rand(3, count, 1, 1) * size / 2 + size / 4).unbind()
    masks = (at - x).square() + (at[:, None] - y).square() < (radius / 2).square()
    images = masks[:, None] + 0.5 * torch.randn(count, 1, size, size)
    return TensorDataset(images, masks.long())


def main(epochs: int = 3) -> None:
    torch.manual_seed(0)
    train = DataLoader(discs(64), batch_size=16, shuffle=True)
    valid = DataLoader(discs(16), batch_size=16)
    model = fxpipe.compile(UNet(), devices=2, microbatches=4, loss=cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, epochs * len(train))
    for epoch in range(epochs):
        model.train()
        for images, masks in train:
            optimizer.zero_grad()
            loss = model.step(images, target=masks)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            print(f"epoch {epoch}: loss {loss.item():.4f}, gradient norm {norm:.3f}")
        model.eval()
        with torch.no_grad():
            error = sum(cross_entropy(model(x), y).item() for x, y in valid) / len(valid)
        print(f"epoch {epoch}: validation loss {error:.4f}")


if __name__ == "__main__":
    main()
