"""The only imports of engines: one package an engine, each on the facade `kvhoist.cache`."""
