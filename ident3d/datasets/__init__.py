"""Serving pictures and latents to torch."""
