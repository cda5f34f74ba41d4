"""The sub-commands, one module each; every module has ``command``."""
