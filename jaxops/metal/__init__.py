"""What each Apple plugin can run (``support``), and the audit of a program against it.

``jaxops.audit`` is the function; ``python -m jaxops.metal.audit`` the command.
"""
