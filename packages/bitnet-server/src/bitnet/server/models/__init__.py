"""The models that a server has: loaded, admitted to, counted."""
