"""TorchRL's faces: updater, sync schemes, policy wrapper, collectors and transforms."""
