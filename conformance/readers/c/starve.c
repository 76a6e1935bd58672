/* Memory that runs out: each file is opened, verified and used again and again, the first time with no allocation
 * that succeeds, then with one, and so on until all do:
 *
 *     rsv-starve FILE...
 *
 * What is asked then must answer RSV_E_MEMORY; a sanitizer sees what is leaked or used without being there. rsv.c is
 * compiled with malloc, calloc and realloc replaced by these. */
#include "rsv.h"

#include <stdio.h>
#include <stdlib.h>

void *starve_malloc(size_t nbytes);
void *starve_calloc(size_t count, size_t nbytes);
void *starve_realloc(void *p, size_t nbytes);

static unsigned long left; /* allocations that will succeed */
static bool failed;

static bool grant(void)
{
    if (left) {
        left--;
        return true;
    }
    failed = true;
    return false;
}

void *starve_malloc(size_t nbytes)
{
    return grant() ? malloc(nbytes) : NULL;
}

void *starve_calloc(size_t count, size_t nbytes)
{
    return grant() ? calloc(count, nbytes) : NULL;
}

void *starve_realloc(void *p, size_t nbytes)
{
    return grant() ? realloc(p, nbytes) : NULL;
}

static void expect(rsv_code code, const char *path, const char *what)
{
    if (failed ? code != RSV_E_MEMORY : code != RSV_OK) {
        fprintf(stderr, "%s: %s: %s\n", path, what, rsv_code_name(code));
        abort();
    }
}

static bool keep_on(void *context, rsv_code code, const char *message)
{
    (void)context, (void)code, (void)message;
    return true;
}

static void use(const rsv_file *file, const char *path)
{
    expect(rsv_verify(file, NULL, NULL, NULL, NULL), path, "verify");
    for (size_t i = 0; !failed && i < file->layer_count; i++) {
        const rsv_layer *l = &file->layers[i];
        rsv_plan *plan;
        float *x = calloc(l->in_features, sizeof *x), *y = calloc(l->rows, sizeof *y);
        if (!x || !y)
            abort();
        rsv_code code = rsv_plan_new(file, l->transform, l->in_features, NULL, &plan, NULL);
        expect(code, path, "plan");
        if (!code) {
            expect(rsv_layer_apply(file, l, plan, x, y), path, "apply");
            if (!failed)
                expect(rsv_layer_row(file, l, plan, 0, x), path, "row");
            rsv_plan_free(plan);
        }
        free(x);
        free(y);
    }
    if (!failed)
        expect(rsv_verify(file, NULL, keep_on, NULL, NULL), path, "verify all");
}

int main(int argc, char **argv)
{
    unsigned long rounds = 0;
    for (int i = 1; i < argc; i++)
        for (unsigned long granted = 0;; granted++) {
            rsv_file *file;
            left = granted;
            failed = false;
            rsv_code code = rsv_open_path(argv[i], &file, NULL);
            expect(code, argv[i], "open");
            if (!code)
                use(file, argv[i]);
            rsv_close(file);
            rounds++;
            if (!failed)
                break;
        }
    printf("%d files, %lu rounds\n", argc - 1, rounds);
    return 0;
}
