"""The models of one server: which of them are loaded (`policy`), loading and unloading (`running`), and whose turn it
is (`pool`)."""
