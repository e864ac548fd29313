"""Scenes as data: TOML specs and the meshes that they name.

`ident3d.scenes` reads them; README.md explains the keys.
"""
