/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/tls.h"

#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent_ssl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include "base/mem.h"

struct tls {
    SSL_CTX *context;
};

/* OpenSSL's first reason behind ours. */
static int fail(struct error *err, const char *what, const char *path)
{
    unsigned long code = ERR_peek_error();
    const char *reason = code ? ERR_reason_error_string(code) : NULL;

    ERR_clear_error();
    return error_set(err, EINVAL, "%s = %s: %s", what, path, reason ? reason : "cannot be used");
}

int tls_new(const char *certificate, const char *key, struct tls **ret, struct error *err)
{
    SSL_CTX *context = SSL_CTX_new(TLS_server_method());
    int r = 0;

    if (!context)
        return error_set(err, ENOMEM, "no memory for TLS");
    ERR_clear_error();
    SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
    SSL_CTX_set_options(context, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION |
                                     SSL_OP_CIPHER_SERVER_PREFERENCE);
    /* A client that just closes is common, and each reply says its own length. */
    SSL_CTX_set_options(context, SSL_OP_IGNORE_UNEXPECTED_EOF);
    if (SSL_CTX_use_certificate_chain_file(context, certificate) != 1)
        r = fail(err, "tls_certificate", certificate);
    else if (SSL_CTX_use_PrivateKey_file(context, key, SSL_FILETYPE_PEM) != 1)
        r = fail(err, "tls_key", key);
    else if (SSL_CTX_check_private_key(context) != 1)
        r = fail(err, "tls_key", key);
    if (r < 0) {
        SSL_CTX_free(context);
        return r;
    }
    *ret = x_alloc(sizeof **ret);
    (*ret)->context = context;
    return 0;
}

void tls_free(struct tls *tls)
{
    if (!tls)
        return;
    SSL_CTX_free(tls->context);
    free(tls);
}

struct bufferevent *tls_bufferevent(struct tls *tls, struct event_base *base)
{
    SSL *ssl = SSL_new(tls->context);
    struct bufferevent *bev;

    if (!ssl)
        return NULL;
    bev = bufferevent_openssl_socket_new(base, -1, ssl, BUFFEREVENT_SSL_ACCEPTING,
                                         BEV_OPT_CLOSE_ON_FREE);
    if (bev)
        bufferevent_openssl_set_allow_dirty_shutdown(bev, 1);
    else
        SSL_free(ssl);
    return bev;
}

bool tls_is_on(struct bufferevent *bev)
{
    return bufferevent_openssl_get_ssl(bev) != NULL;
}

/* The callback that tls_tell_when_empty stands before: evhttp has one for all connections. */
static bufferevent_data_cb written;

static void on_written(struct bufferevent *bev, void *arg)
{
    if (!evbuffer_get_length(bufferevent_get_output(bev)))
        written(bev, arg);
}

void tls_tell_when_empty(struct bufferevent *bev)
{
    bufferevent_data_cb on_read, on_write;
    bufferevent_event_cb on_event;
    void *arg;

    bufferevent_getcb(bev, &on_read, &on_write, &on_event, &arg);
    if (!tls_is_on(bev) || !on_write || on_write == on_written)
        return;
    written = on_write;
    bufferevent_setcb(bev, on_read, on_written, on_event, arg);
}
