"""A static folder with the page and an engine that answers it within the browser, made by ``bitnet web build``."""
