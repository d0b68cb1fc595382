"""How models treat the arguments of their constructors."""

import dataclasses
import difflib
import functools


def known_arguments_only(cls):
    """Class decorator: unknown arguments are refused, with the name they may mean."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self, *args, **kwargs):
        known = [f.name for f in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise TypeError(
                    f"{cls.__name__} has no argument {name!r}.{hint} It takes "
                    f"{', '.join(n for n in known if n not in ('parent', 'name'))}."
                )
        init(self, *args, **kwargs)

    cls.__init__ = checked
    return cls
