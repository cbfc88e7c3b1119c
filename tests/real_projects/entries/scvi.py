"""Counts of genes in cells, by the project's own ``train``: scVI, scANVI with labels, totalVI with proteins."""

import numpy as np
import scvi
from anndata import AnnData

from tests.real_projects.cases import Case, Run


def counts() -> AnnData:
    scvi.settings.seed = 0
    return scvi.data.synthetic_iid(batch_size=40, n_genes=30, n_proteins=8)


def trained(run: Run, model: object, **more: object) -> None:
    scvi.settings.seed = 0
    arguments = run.trainer(max_epochs=2, check_val_every_n_epoch=1, log_every_n_steps=1)
    # The project has a logger and a bar of its own.
    arguments = {name: value for name, value in arguments.items() if name not in ("logger", "enable_checkpointing")}
    model.train(batch_size=16, train_size=0.8, shuffle_set_split=False, **more, **arguments)
    history = {name: np.asarray(values, dtype=float) for name, values in model.history.items()}
    run.keep(latent=model.get_latent_representation(), history=history)


def scvi_model(run: Run) -> None:
    data = counts()
    scvi.model.SCVI.setup_anndata(data, batch_key="batch")
    trained(run, scvi.model.SCVI(data, n_hidden=32, n_latent=5, dropout_rate=0.0))


def scanvi_model(run: Run) -> None:
    data = counts()
    scvi.model.SCANVI.setup_anndata(data, "labels", unlabeled_category="label_0", batch_key="batch")
    # A last batch of one row has no statistics.
    trained(
        run, scvi.model.SCANVI(data, n_hidden=32, n_latent=5, dropout_rate=0.0), datasplitter_kwargs={"drop_last": True}
    )


def totalvi_model(run: Run) -> None:
    data = counts()
    scvi.model.TOTALVI.setup_anndata(
        data, "protein_expression", protein_names_uns_key="protein_names", batch_key="batch"
    )
    model = scvi.model.TOTALVI(
        data,
        n_latent=5,
        n_hidden=32,
        dropout_rate_encoder=0.0,
        dropout_rate_decoder=0.0,
        empirical_protein_background_prior=False,
    )
    trained(run, model, early_stopping=False, reduce_lr_on_plateau=False)


CASES = {
    "SCVI": Case(scvi_model, "`train`; latent representation"),
    "SCANVI": Case(scanvi_model, "the same"),
    "TOTALVI": Case(totalvi_model, "the same, manual optimization"),
}
