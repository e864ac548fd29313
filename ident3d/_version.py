"""The version, in a module of its own so that a render worker can read it without the package's metadata."""

__version__ = "0.1.0"
