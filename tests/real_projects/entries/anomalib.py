"""Anomalies in images: PaDiM by the project's own engine, which fits and tests it."""

import numpy as np
from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.models import Padim
from lightning.pytorch import seed_everything
from PIL import Image

from tests.real_projects.cases import Case, Run


def images(run: Run) -> Folder:
    rng = np.random.default_rng(0)
    for kind, count in (("good", 12), ("bad", 6), ("masks", 6)):
        (run.folder / kind).mkdir(exist_ok=True)
        for index in range(count):
            pixels = rng.integers(90, 110, (64, 64, 3), dtype=np.uint8)
            if kind == "bad":
                pixels[16:32, 16:32] = 255
            if kind == "masks":
                pixels = np.zeros((64, 64), dtype=np.uint8)
                pixels[16:32, 16:32] = 255
            Image.fromarray(pixels).save(run.folder / kind / f"{index}.png")
    sizes = {"train_batch_size": 4, "eval_batch_size": 4, "num_workers": 0}
    return Folder("made", "good", run.folder, abnormal_dir="bad", mask_dir="masks", seed=0, **sizes)


def padim(run: Run) -> None:
    seed_everything(0)
    data = images(run)
    size = Padim.configure_pre_processor((64, 64))
    model = Padim(pre_trained=False, pre_processor=size, visualizer=False)
    engine = Engine(default_root_dir=run.folder, **run.trainer(max_epochs=1, enable_checkpointing=True))
    engine.fit(model, datamodule=data)
    run.keep(tested=engine.test(model, datamodule=data), predictions=engine.predict(model, datamodule=data))


CASES = {"PaDiM": Case(padim, "`Engine`: fit, test, predict")}
