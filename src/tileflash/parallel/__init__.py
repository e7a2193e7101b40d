"""Many ranks train one model: applied to models, data and checkpoints from outside, on torch.distributed alone."""
