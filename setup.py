"""Build script: the metadata is in pyproject.toml, what has to be computed at build time is here."""

from setuptools import find_packages, setup

setup(packages=find_packages(include=["steptron", "steptron.*"]))
