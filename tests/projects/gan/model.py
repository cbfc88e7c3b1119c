"""A generative adversarial network, trained with manual optimization."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .pictures import save_grid


class Generator(nn.Module):
    """From latent vectors to images of 12 by 12 pixels. No batch norm: images do not depend on their neighbours."""

    def __init__(self, latent_size: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Linear(latent_size, 2 * width * 9), nn.Unflatten(1, (2 * width, 3, 3)), nn.LeakyReLU(0.2)),
            nn.Sequential(nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.GroupNorm(2, width), nn.LeakyReLU(0.2)),
            nn.Sequential(nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh()),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise)


class Discriminator(nn.Module):
    """Tells drawings (positive logits) from what the generator makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2)),
            nn.Sequential(nn.Conv2d(width, 2 * width, 4, 2, 1), nn.GroupNorm(2, 2 * width), nn.LeakyReLU(0.2)),
            nn.Sequential(nn.Flatten(), nn.Linear(2 * width * 9, 1)),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).squeeze(-1)


class GAN(L.LightningModule):
    """Two networks against each other; the discriminator takes several steps for each of the generator.

    Args:
        latent_size: numbers in a latent vector.
        width: channels of the hidden layers.
        lr: learning rate of both networks.
        discriminator_steps: batches per step of the generator.
        clip: largest norm of the gradients of the discriminator.
    """

    def __init__(
        self,
        latent_size: int = 8,
        width: int = 8,
        lr: float = 2e-3,
        discriminator_steps: int = 2,
        clip: float = 1.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator(latent_size, width)
        self.discriminator = Discriminator(width)
        self.register_buffer("shown_noise", torch.randn(16, latent_size))

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        generator_optimizer, discriminator_optimizer = self.optimizers()
        real, noise = batch["image"], batch["noise"]

        self.toggle_optimizer(discriminator_optimizer)
        real_logits = self.discriminator(real)
        fake_logits = self.discriminator(self(noise).detach())
        loss = (F.softplus(-real_logits).mean() + F.softplus(fake_logits).mean()) / 2
        discriminator_optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(
            discriminator_optimizer, gradient_clip_val=self.hparams.clip, gradient_clip_algorithm="norm"
        )
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)
        self.lr_schedulers()[1].step()
        self.log("discriminator_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict(
            {
                "real_share": (real_logits > 0).float().mean(),
                "fake_share": (fake_logits > 0).float().mean(),
                "discriminator_lr": discriminator_optimizer.param_groups[0]["lr"],
            }
        )

        if (batch_idx + 1) % self.hparams.discriminator_steps == 0:
            self.toggle_optimizer(generator_optimizer)
            loss = F.softplus(-self.discriminator(self(noise))).mean()
            generator_optimizer.zero_grad()
            self.manual_backward(loss)
            generator_optimizer.step()
            self.untoggle_optimizer(generator_optimizer)
            self.log("generator_loss", loss, prog_bar=True, on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        generator_scheduler, _ = self.lr_schedulers()
        self.log("generator_lr", generator_scheduler.get_last_lr()[0])
        generator_scheduler.step()
        with torch.no_grad():
            save_grid(self(self.shown_noise), self.trainer.log_dir, f"epoch-{self.current_epoch}.pgm")

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(network.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
            for network in (self.generator, self.discriminator)
        ]
        return optimizers, [
            torch.optim.lr_scheduler.StepLR(optimizers[0], step_size=1, gamma=0.9),
            torch.optim.lr_scheduler.LinearLR(optimizers[1], start_factor=0.2, total_iters=8),
        ]
