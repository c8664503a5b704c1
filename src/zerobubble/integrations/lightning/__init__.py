"""`PipelineStrategy`: Lightning's Trainer with the network of a LightningModule in a pipeline."""

from zerobubble.integrations.versions import needed

with needed("lightning"):
    from zerobubble.integrations.lightning.strategy import PipelineStrategy

__all__ = ["PipelineStrategy"]
