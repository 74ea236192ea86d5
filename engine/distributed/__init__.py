"""Beyond one process: workers and their connections, replicas behind a router, weight updates of all of them."""
