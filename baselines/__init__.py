"""Consumers of the library: the baselines of Zimmermann et al. 2021. The library never imports them."""
