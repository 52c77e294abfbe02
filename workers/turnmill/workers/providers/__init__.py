"""Providers of models: one file each, behind the protocol of `base`."""
