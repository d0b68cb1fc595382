"""Imports each module of the installed packages. Run it from outside the checkout."""

import importlib
import pkgutil

count = 0
for name in ("jaxops", "models", "train"):
    package = importlib.import_module(name)
    if "site-packages" not in package.__file__:
        raise SystemExit(f"{name} comes from {package.__file__}, not from the wheel")
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        importlib.import_module(module.name)
        count += 1
print(f"{count} installed modules import")
