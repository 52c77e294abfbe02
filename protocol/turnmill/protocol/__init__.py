"""The wire: what every process and language of Turnmill agrees on."""
