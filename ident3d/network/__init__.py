"""Files from elsewhere, to be trusted only as far as their checksums go: HTTP, fsspec, the Hub, archives."""
