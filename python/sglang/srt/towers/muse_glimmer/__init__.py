"""The encoder of Muse-Glimmer."""
