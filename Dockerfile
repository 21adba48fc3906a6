# The tests in a container, on CPUs:  docker build -t mfsdp . && docker run --rm --shm-size 2g mfsdp
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends git make g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /mfsdp
COPY . .
RUN make venv
CMD ["make", "test"]
