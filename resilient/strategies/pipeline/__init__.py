"""Pipeline parallelism: a model is cut into consecutive stages, each on its own ranks."""
