"""Speech from text: the project's Lightning module on batches as its collator makes them."""

from typing import Any

import torch
from lightning.pytorch import seed_everything
from matcha.models.matcha_tts import MatchaTTS
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from tests.real_projects.cases import Case, Run
from tests.real_projects.draws import constant

SYMBOLS, MELS = 20, 8
