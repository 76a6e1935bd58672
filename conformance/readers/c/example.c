/* Maps an RSV file and multiplies: y = x @ W.T + bias of each layer, or of the one that is named.
 *
 *     rsv-multiply FILE [LAYER [X ...]]
 *
 * x is the numbers given, or 1, 1/2, 1/3, ...; each line of output is a layer's name and y, one number for each row
 * (of a stack, matrix after matrix). W is never built: x is transformed once and meets the rows as they are stored. */
#include <rsv.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failed(const char *what, const rsv_error *error)
{
    fprintf(stderr, "%s: %s: %s\n", what, rsv_code_name(error->code), error->message);
    return 1;
}

static int multiply(const rsv_file *file, const rsv_layer *layer, int count, char **numbers)
{
    rsv_error error;
    rsv_plan *plan = NULL;
    const rsv_options options = {.max_factor_order = 2048}; /* seconds, for a file from anywhere */
    float *x = NULL, *y = NULL;
    int status = 1;

    if (count && (uint32_t)count != layer->in_features) {
        fprintf(stderr, "x has %d numbers, the layer takes %u\n", count, (unsigned)layer->in_features);
        return 2;
    }
    x = malloc(layer->in_features * sizeof *x);
    y = malloc(layer->rows * sizeof *y);
    if (!x || !y) {
        fprintf(stderr, "out of memory\n");
    } else if (rsv_plan_new(file, layer->transform, layer->in_features, &options, &plan, &error)) {
        failed("transform", &error);
    } else {
        for (uint32_t j = 0; j < layer->in_features; j++) {
            x[j] = count ? strtof(numbers[j], NULL) : 1.0f / (float)(j + 1);
        }
        if (rsv_layer_apply(file, layer, plan, x, y)) {
            fprintf(stderr, "out of memory\n");
        } else {
            fwrite(layer->name.data, 1, layer->name.size, stdout);
            for (uint64_t r = 0; r < layer->rows; r++) printf(" %.9g", (double)y[r]);
            putchar('\n');
            status = 0;
        }
    }
    rsv_plan_free(plan);
    free(y);
    free(x);
    return status;
}

int main(int argc, char **argv)
{
    rsv_file *file;
    rsv_error error;
    int status = 0, found = 0;

    if (argc < 2) {
        fprintf(stderr, "usage: rsv-multiply FILE [LAYER [X ...]]\n");
        return 2;
    }
    if (rsv_open_path(argv[1], &file, &error)) return failed(argv[1], &error);
    /* rsv_verify, which reads every byte, is for files that come from somewhere else; open suffices to be safe. */
    for (size_t i = 0; i < file->layer_count && !status; i++) {
        const rsv_layer *layer = &file->layers[i];
        const size_t size = argc > 2 ? strlen(argv[2]) : 0;
        if (argc > 2 && (layer->name.size != size || memcmp(layer->name.data, argv[2], size))) continue;
        found = 1;
        status = multiply(file, layer, argc > 3 ? argc - 3 : 0, argv + 3);
    }
    if (argc > 2 && !found) {
        fprintf(stderr, "%s: there is no layer %s\n", argv[1], argv[2]);
        status = 2;
    }
    rsv_close(file);
    return status;
}
