"""Voice activity in recordings: the project's task and model on a protocol of made-up files."""

import wave
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from lightning.pytorch import Trainer, seed_everything
from pyannote.audio.core import io
from pyannote.audio.models.segmentation import PyanNet
from pyannote.audio.tasks import VoiceActivityDetection
from pyannote.core import Annotation, Segment, Timeline
from pyannote.database.protocol import SpeakerDiarizationProtocol

from tests.real_projects.cases import Case, Run

RATE = 16000


class Decoder:
    """Of files, in place of the project's, which needs libraries of FFmpeg."""

    def __init__(self, path: str) -> None:
        with wave.open(path) as file:
            sound = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16) / 32768
        self.sound = torch.from_numpy(sound.astype(np.float32))[None]
        self.metadata = SimpleNamespace(sample_rate=RATE, duration_seconds_from_header=len(sound) / RATE)

    def get_samples_played_in_range(self, start: float, end: float) -> SimpleNamespace:
        first = round(start * RATE)
        return SimpleNamespace(data=self.sound[:, first : first + round((end - start) * RATE)], sample_rate=RATE)


class Recordings(SpeakerDiarizationProtocol):
    """Files of noise in which a tone is the voice."""

    name = "Made.SpeakerDiarization.Up"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def files(self, subset: str, count: int) -> Iterator[dict[str, Any]]:
        for index in range(count):
            name = f"{subset}{index}"
            seconds = np.arange(8 * RATE) / RATE
            tone = np.sin(2 * np.pi * (200 + 40 * index) * seconds) * ((seconds > 2) & (seconds < 5))
            sound = 0.2 * tone + 0.01 * np.random.default_rng(index).normal(size=len(seconds))
            with wave.open(str(self.folder / f"{name}.wav"), "wb") as file:
                file.setparams((1, 2, RATE, 0, "NONE", ""))
                file.writeframes((sound * 32767).astype(np.int16).tobytes())
            spoken = Annotation(uri=name)
            spoken[Segment(2, 5)] = "voice"
            yield {
                "uri": name,
                "database": "Made",
                "subset": subset,
                "scope": "file",
                "audio": str(self.folder / f"{name}.wav"),
                "annotation": spoken,
                "annotated": Timeline([Segment(0, 8)], uri=name),
            }

    def train_iter(self) -> Iterator[dict[str, Any]]:
        return self.files("train", 4)

    def development_iter(self) -> Iterator[dict[str, Any]]:
        return self.files("development", 2)


def voice(run: Run) -> None:
    seed_everything(0)
    task = VoiceActivityDetection(Recordings(run.folder), duration=2.0, batch_size=8, num_workers=0)
    lstm = {"hidden_size": 16, "num_layers": 1, "bidirectional": True, "monolithic": True, "dropout": 0.0}
    model = PyanNet(task=task, sincnet={"stride": 10}, lstm=lstm, linear={"hidden_size": 16, "num_layers": 1})
    trainer = Trainer(**run.trainer(max_epochs=2, limit_train_batches=3))
    with mock.patch.object(io, "AudioDecoder", Decoder):
        trainer.fit(model)
        run.keep(validated=trainer.validate(model))


CASES = {"VAD": Case(voice, "PyanNet: training, validation")}
