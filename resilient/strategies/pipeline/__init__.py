"""Pipeline parallelism: a model cut into consecutive stages, each on its own ranks."""
