{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{- define "writeback-exporter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "writeback-exporter.fullname" -}}
{{- $name := include "writeback-exporter.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "writeback-exporter.selector" -}}
app.kubernetes.io/name: {{ include "writeback-exporter.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "writeback-exporter.labels" -}}
{{ include "writeback-exporter.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "writeback-exporter.image" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag }}
{{- .Values.image.repository }}{{ ternary "@" ":" (hasPrefix "sha256:" $tag) }}{{ $tag }}
{{- end }}

{{/* A probe of (list $ path values): those values or, without any, one of the path. */}}
{{- define "writeback-exporter.probe" -}}
{{- $root := index . 0 }}
{{- if index . 2 }}
{{- toYaml (index . 2) }}
{{- else if or $root.Values.webConfig.secret $root.Values.webConfig.configMap }}
tcpSocket:
  port: metrics
{{- else }}
httpGet:
  path: {{ index . 1 }}
  port: metrics
{{- end }}
{{- end }}
