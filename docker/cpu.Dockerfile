# For CPUs: docker build -f docker/cpu.Dockerfile -t jaxserve .
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY jaxserve jaxserve
COPY pallas_kernels pallas_kernels
COPY sharding_rules sharding_rules
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl
RUN useradd --uid 1000 --create-home jaxserve && install --directory --owner 1000 --mode 0700 /cache
USER 1000
ENV JAXSERVE_CACHE=/cache
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["jaxserve"]
CMD ["--help"]
