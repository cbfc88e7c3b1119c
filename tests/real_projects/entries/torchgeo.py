"""Satellite images, with the project's own tasks: segmentation with three losses, momentum contrast, detection."""

from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchgeo.datamodules.utils import collate_fn_detection
from torchgeo.trainers import MoCoTask, ObjectDetectionTask, SemanticSegmentationTask

from tests.real_projects.cases import Case, Run

SIZE = 32


class Scenes(Dataset[Any]):
    """Images with what a task asks for."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(index)
        image = torch.rand(3, SIZE, SIZE, generator=random)
        if self.kind == "mask":
            return {"image": image, "mask": torch.randint(4, (SIZE, SIZE), generator=random)}
        corner = torch.randint(SIZE // 2, (1 + index % 2, 2), generator=random)
        boxes = torch.cat([corner, corner + SIZE // 2], 1).float()
        return {"image": image, "bbox_xyxy": boxes, "label": torch.ones(len(boxes), dtype=torch.long)}


def task(run: Run, make_task: Any, kind: str, collate: Any = None, predicts: bool = True) -> None:
    loader = DataLoader(Scenes(kind), batch_size=4, collate_fn=collate)

    def make() -> Any:
        seed_everything(0)
        return make_task()

    # In float32 AdamW makes full steps of what is rounding error in step 0, and batch norms spread them.
    # Schedules of the other tasks follow the loss of the validation.
    trainer, trained = run.fit(make, loader, *[loader] * predicts, precision="64-true")
    if predicts:
        run.keep(predictions=trainer.predict(trained, loader))


def segmentation(run: Run, loss: str) -> None:
    task(run, lambda: SemanticSegmentationTask("unet", "resnet18", num_classes=4, loss=loss), "mask")


def moco(run: Run) -> None:
    same = {"augmentation1": nn.Identity(), "augmentation2": nn.Identity(), "size": SIZE}
    sizes = {"hidden_dim": 32, "output_dim": 16, "layers": 2, "version": 2, "memory_bank_size": 32, "lr": 0.03}
    task(run, lambda: MoCoTask("resnet18", **sizes, **same), "mask", predicts=False)


def detection(run: Run) -> None:
    task(
        run,
        lambda: ObjectDetectionTask("retinanet", "resnet18", num_classes=2, lr=1e-4),
        "boxes",
        collate_fn_detection,
    )


CASES = {
    "U-Net": Case(lambda run: segmentation(run, "ce"), "training, resumed; predictions"),
    "focal": Case(lambda run: segmentation(run, "focal"), "U-Net with this loss: the same"),
    "jaccard": Case(lambda run: segmentation(run, "jaccard"), "U-Net with this loss: the same"),
    "MoCo": Case(moco, "training, resumed"),
    "RetinaNet": Case(detection, "training, resumed; predictions"),
}
